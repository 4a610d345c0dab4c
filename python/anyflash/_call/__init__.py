"""A call: its options, its operands, and what it gives the binding."""
