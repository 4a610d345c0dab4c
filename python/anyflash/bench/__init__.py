"""`python -m anyflash bench`: attention's speed on this machine, beside others' and its rooflines.

Everything runs in one process, in turns, so that clocks and temperature are the same for all:

* a case (`_cases`, `_presets`) is one problem; `_problem` makes its random tensors;
* a contender is anyflash (`_anyflash_calls`) or somebody else's attention (`_torch_peers`,
  `_peers`); its result is compared with anyflash's once, before anything is timed (`_measure`);
* `_timing` takes the samples, `_machine` says on what, `_rooflines` what the machine could give;
* `_report`, `_compare` and `_plot` show a finished run, which is a plain dictionary (JSON).
"""
