"""How the nodes of an attempt find each other before a rank starts, and watch each other after."""
