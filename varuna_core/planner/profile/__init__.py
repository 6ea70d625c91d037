"""Hold a model's costs and the links' times as data: `profile_file.read_profile`, `write_profile`.

`transformer.estimate_profile` makes a profile from data sheets. Imports the records.
"""
