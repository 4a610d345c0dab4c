"""What `python -m anyflash` does besides the demonstration and the benchmark."""
