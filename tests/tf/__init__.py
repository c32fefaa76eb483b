"""The TensorFlow adapter, its ranks as threads of one process."""
