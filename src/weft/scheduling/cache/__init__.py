"""The KV cache as the scheduler sees it: blocks, block tables, prefix sharing, swap slots and sessions."""
