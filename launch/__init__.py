"""The commands; `launch.lib` has their shared code, `launch.studies` the code behind single figures
and tables.
"""
