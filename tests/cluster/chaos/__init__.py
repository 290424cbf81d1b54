"""Small requests on a real cluster while parts of it die: each must end right, or failed with a true verdict."""
