"""hvdlite: data-parallel training with Horovod's API, installed by pip alone."""
