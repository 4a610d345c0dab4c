"""anyflash behind the attention interfaces of other libraries; each module imports its library."""
