"""Plans: what each head will do.

==============  ==========================================================================
`plan`          `Plan` and the settings of each head
`files`         plans as JSON; `schema`: its fields, checked when it is read
`drawing`       a picture of the components of a head
`cost`          multiply-adds of a plan, and its predicted time on this machine
==============  ==========================================================================
"""
