"""Jobs on one or several hosts over ssh, used by launch.py. Start with job.py."""
