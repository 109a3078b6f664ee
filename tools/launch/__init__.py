"""Jobs that launch.py starts on one or several hosts over ssh. Start reading in job.py."""
