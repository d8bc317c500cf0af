"""Runs recipe files by mergekit, one after the other in one process: `mergekit-yaml` for one
recipe, `mergekit-multi` for several in a file.

    python recipes_driver.py RECIPE.yml OUT [RECIPE.yml OUT]...

Executed by an interpreter that has mergekit; imports nothing of mergegit.
"""

import sys
from pathlib import Path

from mergekit.scripts import multimerge, run_yaml

if __name__ == "__main__":
    arguments = sys.argv[1:]
    for recipe, out in zip(arguments[::2], arguments[1::2], strict=True):
        options = ["--no-copy-tokenizer", "--random-seed", "42", "--quiet", "--no-write-model-card"]
        if "\n---\n" in Path(recipe).read_text():
            places = ["--out-path", out, "-I", f"{out}-parts"]
            multimerge.main([recipe, *places, *options], standalone_mode=False)
        else:
            run_yaml.main([recipe, out, *options], standalone_mode=False)
