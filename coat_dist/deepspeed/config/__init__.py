"""From the arguments of ``deepspeed.initialize`` to a request on which all ranks agree."""
