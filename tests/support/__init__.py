"""What tests share: `from tests.support.cases import ...` or `from tests.support import half`, never by a bare name."""
