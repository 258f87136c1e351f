"""Claims about the tasks of KerasHub: raw data train them as `fit` does."""

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import Checkpoint, GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras

REASON = "needs keras-hub (the extra `keras-hub`), and what it reads text with"
keras_hub = pytest.importorskip("keras_hub", reason=REASON)
if BACKEND == "tensorflow":
    pytest.importorskip("tensorflow_text", reason=REASON)

pytestmark = [
    pytest.mark.usefixtures("without_xla"),
    # Preprocessing mixes dtypes as NumPy does, and warns of much.
    pytest.mark.usefixtures("keras_may_promote"),
    pytest.mark.filterwarnings("default"),
]

models = keras_hub.models
tokenizers = keras_hub.tokenizers
WORDS = "a cold wind blew over hills while an old dog slept near warm fires"
TEXTS = [
    "a cold wind blew",
    "an old dog slept near warm fires",
    "over hills",
    "a warm wind slept while an old cold dog blew over fires",
    "dog",
    "near hills a dog slept",
    "warm old hills",
]
LABELS = np.array([0, 1, 1, 2, 1, 1, 1])
SIZES = {
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 12,
    "dropout": 0.0,
}


def make_bert(cls, preprocess, **options):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
    tokenizer = tokenizers.BertTokenizer(vocabulary=vocabulary)
    backbone = models.BertBackbone(
        len(vocabulary), max_sequence_length=10, **SIZES
    )
    preprocessor = preprocess(tokenizer, sequence_length=10)
    return cls(backbone, preprocessor=preprocessor, **options)


def make_classifier():
    return make_bert(
        models.BertTextClassifier,
        models.BertTextClassifierPreprocessor,
        num_classes=3,
        dropout=0.0,
    )


def mask_all(tokenizer, **options):
    """Mask every word, so that nothing is left to chance."""
    return models.BertMaskedLMPreprocessor(
        tokenizer,
        mask_selection_rate=1.0,
        mask_token_rate=1.0,
        random_token_rate=0.0,
        mask_selection_length=8,
        **options,
    )


def mask_some(tokenizer, **options):
    """Mask words by chance, as KerasHub does unless told."""
    return models.BertMaskedLMPreprocessor(
        tokenizer, mask_selection_rate=0.5, mask_selection_length=8, **options
    )


def make_masked_lm():
    return make_bert(models.BertMaskedLM, mask_all)


def letters(*special):
    names = [*special, *"abcdefghijklmnopqrstuvwxyz", "\u0120", "an"]
    return {name: i for i, name in enumerate(names)}


def make_causal_lm():
    vocabulary = letters("<|endoftext|>")
    tokenizer = tokenizers.GPT2Tokenizer(vocabulary=vocabulary, merges=["a n"])
    return models.GPT2CausalLM(
        models.GPT2Backbone(len(vocabulary), max_sequence_length=12, **SIZES),
        preprocessor=models.GPT2CausalLMPreprocessor(
            tokenizer, sequence_length=12
        ),
    )


def make_adapted_lm():
    task = make_causal_lm()
    task.backbone.enable_lora(2)
    return task


def make_seq2seq():
    vocabulary = letters("<s>", "<pad>", "</s>", "<mask>")
    tokenizer = tokenizers.BartTokenizer(vocabulary=vocabulary, merges=["a n"])
    return models.BartSeq2SeqLM(
        models.BartBackbone(len(vocabulary), max_sequence_length=12, **SIZES),
        preprocessor=models.BartSeq2SeqLMPreprocessor(
            tokenizer, encoder_sequence_length=12, decoder_sequence_length=8
        ),
    )


def make_image_classifier():
    sizes = {name: SIZES[name] for name in ("num_layers", "num_heads")}
    return models.ViTImageClassifier(
        models.ViTBackbone((8, 8, 3), 4, hidden_dim=8, mlp_dim=12, **sizes),
        num_classes=3,
        preprocessor=models.ViTImageClassifierPreprocessor(
            keras_hub.layers.ViTImageConverter((8, 8), scale=1 / 255)
        ),
    )


def make_mixture_of_experts():
    """Make a causal LM without preprocessor, for tokens."""
    backbone = models.MixtralBackbone(
        vocabulary_size=20,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=8,
        intermediate_dim=12,
        num_experts=4,
        top_k=1,
        router_aux_loss_coef=0.5,
    )
    return models.MixtralCausalLM(backbone)


IMAGES = np.random.default_rng(0).integers(0, 256, [7, 12, 10, 3], "uint8")
PAIRS = {"encoder_text": TEXTS, "decoder_text": TEXTS[::-1]}
TASKS = {
    "text classifier": (make_classifier, (TEXTS, LABELS)),
    "pairs of texts": (make_classifier, ((TEXTS, TEXTS[::-1]), LABELS)),
    "masked LM": (make_masked_lm, (TEXTS,)),
    "causal LM": (make_causal_lm, (TEXTS,)),
    "causal LM with LoRA": (make_adapted_lm, (TEXTS,)),
    "sequence to sequence": (make_seq2seq, (PAIRS,)),
    "image classifier": (make_image_classifier, (IMAGES, LABELS)),
}


def compiled(make):
    """Make a task; its dense gradients treat repeated words alike."""
    keras.utils.set_random_seed(1)
    task = make()
    task.compile(
        optimizer=keras.optimizers.SGD(0.1),
        jit_compile=BACKEND == "jax",
    )
    return task


def assert_close_weights(one, other, before):
    weights = one.get_weights()
    for a, b in zip(weights, other.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    gaps = [np.abs(a - b).max() for a, b in zip(weights, before, strict=True)]
    assert max(gaps) > 1e-4


def assert_close_logs(expected, found):
    for name, values in expected.items():
        np.testing.assert_allclose(values, found[name], rtol=1e-5, err_msg=name)


def train(make, data, **options):
    """Train a task by its own fit, and another by a Trainer."""
    by_itself, task = compiled(make), compiled(make)
    before = task.get_weights()
    options = {"batch_size": 5, "shuffle": False, "verbose": 0} | options
    logs = by_itself.fit(*data, **options).history
    trainer = Trainer(task, accumulation=Accumulation(micro_batch_size=2))
    assert_close_logs(logs, trainer.fit(*data, **options).history)
    assert_close_weights(by_itself, task, before)
    return by_itself, trainer


@pytest.mark.parametrize("name", TASKS)
def test_raw_data_train_a_task_as_its_own_fit_does(name):
    make, data = TASKS[name]
    train(make, data)


def test_task_is_validated_and_predicts_as_by_itself():
    by_itself, trainer = train(
        make_classifier, (TEXTS, LABELS), validation_data=(TEXTS, LABELS)
    )
    options = {"batch_size": 5, "verbose": 0}
    np.testing.assert_allclose(
        by_itself.predict(TEXTS, **options),
        trainer.predict(TEXTS, **options),
        atol=1e-5,
    )
    assert_close_logs(
        by_itself.evaluate(TEXTS, LABELS, return_dict=True, **options),
        trainer.evaluate(TEXTS, LABELS, return_dict=True, **options),
    )


def test_loader_batches_of_raw_text_make_up_the_big_batch():
    by_itself, task = compiled(make_classifier), compiled(make_classifier)
    before = task.get_weights()
    by_itself.fit(TEXTS, LABELS, batch_size=7, shuffle=False, verbose=0)
    batches = [(TEXTS[i : i + 2], LABELS[i : i + 2]) for i in range(0, 7, 2)]
    Trainer(task, accumulation=4).fit(batches, verbose=0)
    assert_close_weights(by_itself, task, before)


def test_callback_accumulates_inside_the_fit_of_a_task():
    by_itself, task = compiled(make_classifier), compiled(make_classifier)
    before, options = task.get_weights(), {"shuffle": False, "verbose": 0}
    by_itself.fit(TEXTS[:6], LABELS[:6], batch_size=6, **options)
    callback = GradientAccumulation(3)
    task.fit(
        TEXTS[:6], LABELS[:6], batch_size=2, callbacks=[callback], **options
    )
    assert_close_weights(by_itself, task, before)


def test_equivalence_is_checked_on_raw_data():
    trainer = Trainer(
        compiled(make_causal_lm), accumulation=Accumulation(micro_batch_size=2)
    )
    assert trainer.check_equivalence((TEXTS,))


@pytest.mark.parametrize("is_loader", [False, True])
def test_masks_are_drawn_again_as_in_the_run_that_was_ended(
    is_loader, tmp_path
):
    def run(**options):
        task = compiled(lambda: make_bert(models.BertMaskedLM, mask_some))
        accumulation = Accumulation(micro_batch_size=2)
        trainer = Trainer(task, accumulation=accumulation, seed=0)
        data = TEXTS
        if is_loader:
            data = [(TEXTS[i : i + 3],) for i in (0, 2, 4)]
        trainer.fit(data, epochs=2, verbose=0, **options)
        return task.get_weights()

    options = {} if is_loader else {"batch_size": 3}
    whole = run(**options)
    for updates in (2, None):
        resumed = run(
            callbacks=[Checkpoint(tmp_path)],
            max_updates=updates,
            resume_from="auto",
            **options,
        )
    for a, b in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(a, b)


def test_equivalence_is_checked_with_masks_drawn_once():
    task = compiled(lambda: make_bert(models.BertMaskedLM, mask_some))
    trainer = Trainer(task, accumulation=Accumulation(micro_batch_size=2))
    assert trainer.check_equivalence((TEXTS,))


def test_balance_of_experts_is_refused_by_the_name_of_its_layer():
    tokens = np.random.default_rng(0).integers(1, 20, [8, 6])
    x = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    trainer = Trainer(
        compiled(make_mixture_of_experts),
        accumulation=Accumulation(micro_batch_size=4),
    )
    with pytest.raises(ValueError, match="add_loss of mixtral") as caught:
        trainer.fit(x, tokens, batch_size=8, verbose=0)
    assert "couples examples" in str(caught.value)
    assert "a coefficient of 0" in str(caught.value)
