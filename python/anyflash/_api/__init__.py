"""The public functions: signatures, descriptions, and what is made of the arguments."""
