"""flash_attn.layers: what programs import of it for attention."""
