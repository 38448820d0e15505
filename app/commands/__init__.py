"""The terminal programs.

In reading order:

cli        The `headrace` command: its subcommands, flags and `headrace config`.
conversation  A conversation in the terminal: messages, files, and the commands that change it.
prompt     The prompt of a conversation: line editor, history, completion.
chat       `headrace chat`: a conversation in the terminal, with live Markdown, or one answer.
run_batch  `headrace run-batch`: a file of requests, answered without a server.
top        `headrace top`: the state of a running server.
doctor     `headrace doctor`: checks of the machine and the settings.
"""
