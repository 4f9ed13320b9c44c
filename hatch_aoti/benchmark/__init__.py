"""What a project's models cost, compiled by hatch-aoti and run in other ways: side by side, each in fresh processes.

`contender` runs inside such a process and is the only module that knows how a contender is made, loaded and called;
`measure` decides what is run when; `figures` are the values that come of it, `table` and `plot` show them.
"""
