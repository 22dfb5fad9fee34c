"""What tests of compiled layers need."""

import pytest
import torch


@pytest.fixture
def fresh_compiler(one_thread):
    """A compiler that knows nothing of other tests, on one thread."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
