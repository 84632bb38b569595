"""Each test begins with accelerate's process-wide state unset."""

from tests.training.conftest import fresh_accelerate

__all__ = ["fresh_accelerate"]
