"""How ``prepare_data.py`` finds input, reads documents, tokenizes shards and keeps its output
consistent.
"""


class DataError(ValueError):
    """Input or settings that cannot be used. The message is complete: argument, given value,
    accepted values.
    """
