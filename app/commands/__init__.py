"""The terminal programs.

In reading order:

cli        The `headrace` command: its subcommands, flags and `headrace config`.
chat       `headrace chat`: a conversation in the terminal, with live Markdown.
run_batch  `headrace run-batch`: a file of requests, answered without a server.
top        `headrace top`: the state of a running server.
doctor     `headrace doctor`: checks of the machine and the settings.
"""
