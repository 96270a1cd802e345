"""Operations and kept bytes of mixers."""
