"""Parts of `python -m anyflash`, but for the benchmark."""
