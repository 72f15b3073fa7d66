import opendp.prelude as dp

dp.enable_features("contrib")


def answer(data):
    categories = list(range(data["categories"]))
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()
    counts = space >> dp.t.then_count_by_categories(categories, null_category=False)
    private = counts >> dp.m.then_laplace(scale=1.0)
    assert private.map(d_in=1) <= 1.0
    return private(data["values"].tolist())
