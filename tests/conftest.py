"""Settings of all tests."""

import torch

torch.set_num_threads(1)  # `make test` runs a process on each core
