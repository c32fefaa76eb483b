"""The PyTorch adapter, its ranks as threads of one process."""
