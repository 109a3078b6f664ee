"""Jobs that launch.py starts on one or several hosts over SSH. Start reading in job.py."""
