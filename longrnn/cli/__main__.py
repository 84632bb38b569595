"""`python -m longrnn.cli`, which `accelerate launch -m longrnn.cli` starts in each process.

`python -m` searches the current folder first, where a file `yaml.py` may lie beside a user's texts.
The folder is moved behind everything installed before more is imported. It stays the last resort,
because a checkout that is not installed is imported from it. What Python itself imports until here
is out of reach: `longrnn`, or `python -P -m longrnn.cli`, never searches the folder.
"""

import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[:1] in ([""], [os.getcwd()]):
        sys.path.append(sys.path.pop(0))

    from longrnn.cli import main

    main()
