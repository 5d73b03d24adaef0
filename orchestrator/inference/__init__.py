"""What trained models take to use: time, memory and size of the file that is handed over."""
