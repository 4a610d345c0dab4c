"""What anyflash asks of a framework's arrays."""
