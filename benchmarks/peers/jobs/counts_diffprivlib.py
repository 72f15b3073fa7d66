from diffprivlib import tools


def answer(data):
    size = data["categories"]
    counts, _ = tools.histogram(data["values"], epsilon=1.0, bins=size, range=(-0.5, size - 0.5))
    return counts
