from tokenwire_client.exports import *  # noqa: F403 (exports.py lists the public names)
