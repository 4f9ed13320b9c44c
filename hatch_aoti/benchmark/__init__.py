"""What a project's models cost, compiled by hatch-aoti and run in other ways: side by side, each in fresh processes.

`child` is such a process: `contenders` says how a contender is made, loaded and called in it, `timing` and `answers`
what is read there. Around it, `measure` decides what is run when (`options` says what for, `bench` where, `builds`
makes what is compared, `measure_model` compares); `figures` are the values that come of it, `table` and `plot` show
them.
"""
