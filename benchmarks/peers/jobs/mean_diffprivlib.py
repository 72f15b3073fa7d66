from diffprivlib import tools


def answer(data):  # its bounds are of coordinates, and epsilon is divided among them
    return tools.mean(data["values"], epsilon=1.0, axis=0, bounds=(-1.0, 1.0))
