"""The command `quartiles`: accuracy by answer length, from sample logs."""
