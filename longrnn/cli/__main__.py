"""`python -m longrnn.cli`, which `accelerate launch -m longrnn.cli` starts in each process.

`python -m` searches the current folder first, where a file `yaml.py` may lie beside a user's texts.
This module therefore moves that folder to the end of `sys.path` before it imports anything else;
the folder stays on the path because a checkout that is not installed is imported from it. Modules
that Python imports before this one are not protected. `longrnn` and `python -P -m longrnn.cli`
never search the current folder.
"""

import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[:1] in ([""], [os.getcwd()]):
        sys.path.append(sys.path.pop(0))

    from longrnn.cli import main

    main()
