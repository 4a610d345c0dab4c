"""flash_attn.ops.triton: what programs import of it for attention; nothing here needs Triton."""
