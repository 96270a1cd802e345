"""Code that tests share: `from tests.support.cases import ...` or `from tests.support import half`."""
