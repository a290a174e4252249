"""Page and membership tables for QSA attention."""
