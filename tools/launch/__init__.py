"""Jobs that launch.py starts on one or several hosts over ssh. Start with job.py."""
