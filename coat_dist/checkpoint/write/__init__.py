"""Files and folders written so that a kill leaves whole ones."""
