"""Record one step of a module; read record.py first, then recorder.py."""
