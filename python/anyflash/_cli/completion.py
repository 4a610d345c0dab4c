"""`python -m anyflash completion`: a shell's script, made of what argparse knows.

It holds all words, so that no Python starts when someone presses the tab key.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

FILES = "*files*"  # in the place of words

BASH = """\
# source <(anyflash completion bash)
_anyflash() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command= word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case $word in {commands}) command=$word; break ;; esac
  done
  case $cur in -*) prev= ;; esac
  COMPREPLY=()
  case $command:$prev in
{cases}
  esac
}}
complete -F _anyflash anyflash
"""
BASH_WORDS = 'COMPREPLY=($(compgen -W "{words}" -- "$cur"))'
BASH_FILES = (
    "compopt -o filenames 2>/dev/null; local IFS=$'\\n'; COMPREPLY=($(compgen -f -- \"$cur\"))"
)

ZSH = """\
#compdef anyflash
# source <(anyflash completion zsh), after compinit; or keep it as _anyflash in a folder of $fpath
_anyflash() {{
  local prev=${{words[CURRENT-1]}} command= word
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    case $word in ({commands}) command=$word; break ;; esac
  done
  case ${{words[CURRENT]}} in (-*) prev= ;; esac
  case $command:$prev in
{cases}
  esac
}}
if [[ $funcstack[1] == _anyflash ]]; then _anyflash "$@"; else compdef _anyflash anyflash; fi
"""
ZSH_WORDS = "compadd -- {words}"
ZSH_FILES = "_files"


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Parsers by command; that of the program has the name ""."""
    found = {"": parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def _values(action: argparse.Action) -> str:
    """Of an option or an argument: words, FILES, or "" for any text."""
    return FILES if action.type is Path else " ".join(map(str, action.choices or ()))


def _cases(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """(command:word before, what can follow): options that take a value, then everything else."""
    for command, its in _commands(parser).items():
        words: list[str] = []
        for action in its._actions:
            words += action.option_strings or _values(action).split()
            if action.nargs != 0:
                yield from (
                    (f"{command}:{flag}", _values(action)) for flag in action.option_strings
                )
        yield f"{command}:*", " ".join(words)


def _of_cases(parser: argparse.ArgumentParser, script: str, words: str, files: str) -> str:
    commands = "|".join(filter(None, _commands(parser)))
    cases = [
        f"    {pattern}) {files if found == FILES else words.format(words=found)} ;;"
        for pattern, found in _cases(parser)
    ]
    return script.format(commands=commands, cases="\n".join(cases))


def _fish_lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield "# anyflash completion fish | source"
    yield "complete -c anyflash -f"
    for command, its in _commands(parser).items():
        where = f"__fish_seen_subcommand_from {command}" if command else "__fish_use_subcommand"
        for action in its._actions:
            values = _values(action)
            if not values and not action.option_strings:
                continue
            line = f"complete -c anyflash -n '{where}'"
            for flag in action.option_strings:
                line += f" -{'l' if flag.startswith('--') else 's'} {flag.lstrip('-')}"
            if action.option_strings and action.nargs != 0:
                line += " -rF" if values == FILES else " -x"
            line += f" -a '{values}'" if values not in ("", FILES) else ""
            about = (action.help or "").replace("\\", "\\\\").replace("'", "\\'")
            yield line + (f" -d '{about}'" if action.option_strings else "")


def _fish(parser: argparse.ArgumentParser) -> str:
    return "\n".join(_fish_lines(parser)) + "\n"


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """For one of SHELLS, which completes the command `anyflash`."""
    return SHELLS[shell](parser)


SHELLS = {
    "bash": lambda parser: _of_cases(parser, BASH, BASH_WORDS, BASH_FILES),
    "zsh": lambda parser: _of_cases(parser, ZSH, ZSH_WORDS, ZSH_FILES),
    "fish": _fish,
}
