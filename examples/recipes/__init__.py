"""Programs that train something tiny, each by another framework, with its conf (docs/recipes.md).

`vjob init --for NAME FOLDER` writes one. They are data, and nothing imports them.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
