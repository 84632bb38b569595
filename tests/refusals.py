"""What a test requires of the message of a refusal: the names and values in it, not its words."""

import re


def naming(*names: object) -> str:
    """A pattern for `pytest.raises(match=…)`: all of `names` occur, in any order."""
    return "".join(rf"(?=[\s\S]*{re.escape(str(name))})" for name in names)
