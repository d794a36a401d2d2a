"""Random corpora, damage, kills and misbehaving steps, held against oracles that know what was done."""
