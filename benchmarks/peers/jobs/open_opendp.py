import opendp.prelude as dp

dp.enable_features("contrib")


def answer(data):
    space = dp.vector_domain(dp.atom_domain(T=str)), dp.symmetric_distance()
    counts = space >> dp.t.then_count_by()

    def private(threshold):
        return counts >> dp.m.then_laplace_threshold(scale=1.0, threshold=threshold)

    threshold = dp.binary_search(
        lambda threshold: private(threshold).map(d_in=1) <= (1.0, 1e-6), bounds=(2, 1000)
    )
    return private(threshold)(data["values"].tolist())
