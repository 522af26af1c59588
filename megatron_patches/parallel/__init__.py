"""Process groups, engines of DeepSpeed, pipeline stages, and what ranks exchange beside
DeepSpeed.
"""
