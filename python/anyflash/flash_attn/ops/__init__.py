"""flash_attn.ops: what programs import of it for attention."""
