"""From the arguments of ``deepspeed.initialize`` to a request on which all ranks agree.

- ``validate.py`` reads the configuration and checks it beside the model and the optimizer: ``validate(given)``.
- ``table.py`` is the table of refused settings, each with its reason and what is accepted.
- ``keys.py`` asks DeepSpeed which keys it reads, and finds misspelt and misplaced ones.
- ``agreement.py`` gives every rank the errors of all: ``agree(request)``.
"""
