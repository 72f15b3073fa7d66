import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_accountant import PLDPrivacyAccountant
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism


class Softmax(torch.nn.Linear):
    def loss(self, inputs, labels):
        return torch.nn.functional.cross_entropy(self(inputs), labels)

    def metrics(self, inputs, labels):
        return {}


def answer(data):
    torch.set_num_threads(1)
    network = Softmax(data["values"].shape[1], 10)
    torch.nn.init.zeros_(network.weight)
    torch.nn.init.zeros_(network.bias)
    model = PyTorchModel(
        model=network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    inputs, targets, owners = (
        torch.from_numpy(data[name]) for name in ("values", "targets", "owners")
    )
    people = [
        Dataset((inputs[owners == person], targets[owners == person]), user_id=str(person))
        for person in range(data["people"])
    ]
    dataset = FederatedDataset(people.__getitem__, get_user_sampler("random", range(len(people))))
    accountant = PLDPrivacyAccountant(
        num_compositions=30,
        sampling_probability=100 / len(people),
        mechanism="gaussian",
        epsilon=4.0,
        delta=1e-5,
    )
    noise = CentrallyAppliedPrivacyMechanism(
        GaussianMechanism.from_privacy_accountant(accountant=accountant, clipping_bound=0.5)
    )
    FederatedAveraging().run(
        backend=SimulatedBackend(training_data=dataset, val_data=dataset, postprocessors=[noise]),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=30,
            evaluation_frequency=31,
            train_cohort_size=100,
            val_cohort_size=0,
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=0.5, local_batch_size=10
        ),
        model_eval_params=None,
    )
    predicted = network(torch.from_numpy(data["test"])).argmax(dim=1).numpy()
    return float((predicted == data["test_targets"]).mean())
